"""``resilio site``: what a site installs beside the commands."""
