"""Workers through Ray; launcher.py is the coordinator's side, driver.py the process beside it."""
