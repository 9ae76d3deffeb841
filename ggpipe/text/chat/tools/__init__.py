"""What models write to call tools, and what they read of tools."""
