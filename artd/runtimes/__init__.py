"""Runtimes: the virtual environments of trainer and engine, each made from a lock that artd ships.

`registry.find(name, device)` is what the supervisor needs, `install.install` makes a runtime, `doctor.report` says what is there.
Nothing here imports a runtime's packages.
"""
