"""TF-Serving's REST form, metrics, health and the status page."""
