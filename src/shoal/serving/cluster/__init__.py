"""Serving clusters: agents, replicas, registries and discovery."""
