"""Writes files that run the same processes on Docker Compose or Kubernetes, and a Dockerfile for their image."""
