"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# A busy machine is no defect: what an example may take in time is not asserted.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")
