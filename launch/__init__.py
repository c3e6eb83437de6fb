"""launch: how serried starts and how people reach it. The command line; programs use `runtime.Engine`."""
