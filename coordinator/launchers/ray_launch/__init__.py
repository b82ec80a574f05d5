"""Starts workers through Ray: launcher.py runs in the coordinator, driver.py in a child process."""
