"""A plan-caching GEMM service."""

__version__ = "0.1.0"
