"""What the command line dispatches to, one file a command."""
