"""Estimate the memory, network and time that training needs on 1 to 1,000 hosts, from measured costs."""
