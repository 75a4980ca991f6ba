"""Measurements on a device; each module is one question, answered in one run and kept as JSON under results/."""
