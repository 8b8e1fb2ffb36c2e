"""Groups of processes: the identity where there is one."""
