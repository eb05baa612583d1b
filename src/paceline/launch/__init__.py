"""From a plan to processes: workers here or on several nodes, watched until all of them have ended."""
