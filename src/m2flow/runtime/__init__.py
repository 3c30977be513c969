"""Lanes on Ray, and the way a flow is put on them."""
