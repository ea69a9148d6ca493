"""What replicas hold: a persistent map from block content to the streams that have it cached."""
