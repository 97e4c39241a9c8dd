"""The operator's tool."""
