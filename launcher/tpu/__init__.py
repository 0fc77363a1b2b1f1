"""TPU VMs by queued resources of the Cloud TPU API."""
