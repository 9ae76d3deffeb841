"""APIs as data: what their bodies ask for, and the objects that answer them. Nothing of HTTP: files have them too."""
