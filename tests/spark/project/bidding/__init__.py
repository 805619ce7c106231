"""What a user might have beside the definitions: a package that is not installed."""
