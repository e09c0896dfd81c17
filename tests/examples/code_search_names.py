"""What the files say that the browser reads, for the program that writes them and the tests that know them."""

SCRIPT = "<script>alert(1)</script>"
IMAGE = '<img src="x" onerror="alert(2)">'
TEMPLATES = "${alert(3)} {{alert(4)}} </pre></div>"
EVIL = f"# {SCRIPT}\n# {IMAGE}\nevil = '{TEMPLATES}'"
EVIL_NAME = "<img src=x onerror=alert(5)>.py"
CHUNKS = 70  # of two requests
