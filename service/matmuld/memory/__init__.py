"""What the service holds for its callers, by handle."""
