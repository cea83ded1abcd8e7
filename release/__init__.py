"""Building and inspecting what is published: ``make wheels``, ``make check-wheels``, ``make release``. No part of the package."""
