"""The wheel's llama-server in this process."""
