"""From a plan to processes: workers here or on several nodes, watched until all of them have ended.

A worker loads little of it, before it loads torch: nothing is imported here.
"""
