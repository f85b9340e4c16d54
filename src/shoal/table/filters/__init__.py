"""Admission: which ids that have no row yet may get one."""
