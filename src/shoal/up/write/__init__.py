"""Files for others who run the same processes: Docker Compose, Kubernetes, and the image for both."""
