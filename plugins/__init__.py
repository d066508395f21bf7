"""The built-in plugins, one folder per extension point. They enter through entry points, as any other plugin does."""
