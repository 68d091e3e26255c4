"""Tests mirror the folders they test; contracts/ holds one suite per seam, properties/ the promises of the design."""
