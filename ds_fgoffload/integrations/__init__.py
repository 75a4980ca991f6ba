"""Bridges to other libraries, imported only by those who use them."""
