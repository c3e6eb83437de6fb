"""The command line: flags from dataclasses, help, prompts, answers, tables."""
