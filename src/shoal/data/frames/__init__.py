"""Samples from data frames in memory and from datasets: Polars, pandas, Arrow and Hugging Face."""
