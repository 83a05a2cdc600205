"""HTTP: bodies in and out, and which path means what."""
