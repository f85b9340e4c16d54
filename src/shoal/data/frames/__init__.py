"""Samples of frames in memory and of datasets: Polars, pandas, Arrow and Hugging Face."""
