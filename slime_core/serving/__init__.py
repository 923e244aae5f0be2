"""What the HTTP servers of plugins share: where they listen, and whom they let in."""
