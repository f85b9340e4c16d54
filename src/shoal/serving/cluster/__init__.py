"""Who serves what, and where: agents, replicas, registries and discovery."""
