"""TF-Serving's REST API, metrics, health and the status page."""
