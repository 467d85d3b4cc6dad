"""The core beside Python's own queues, and its goals."""
