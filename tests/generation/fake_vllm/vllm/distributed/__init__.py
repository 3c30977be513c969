"""Its ways between processes."""
