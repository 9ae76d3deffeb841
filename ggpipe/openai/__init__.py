"""OpenAI's API as data: what its bodies ask for, and the objects that answer them. Requests over HTTP and files of
prompts both have them."""
