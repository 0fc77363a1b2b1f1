"""The models, by the names that recipes use."""
