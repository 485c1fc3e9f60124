"""Checks of what hardware leaves undefined: initialisation, proxies, ordering, races, leaks."""
