"""What every HTTP request passes on its way in. Pure ASGI: nothing here hides a disconnect."""
