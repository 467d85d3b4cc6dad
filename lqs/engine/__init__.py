"""Models and the native worker: files, templates, libllama."""
