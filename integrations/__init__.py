"""One module per stack; each imports its framework inside functions. Import as `dlc_sentinel.integrations.<stack>`."""
