"""The dashboard: a read-only web page over a data folder, beside a daemon or without one."""
