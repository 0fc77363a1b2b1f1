"""GKE: a plan as a JobSet, submitted, watched and taken away with the Kubernetes API."""
