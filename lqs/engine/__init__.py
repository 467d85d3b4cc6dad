"""Models, their files, their templates and the device slots that run them."""
