"""Journeys: who starts from nothing and follows only the pages gets a mount. See `tests.journeys.journey`."""
