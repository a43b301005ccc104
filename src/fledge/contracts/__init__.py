"""What the parts of fledge promise each other; standard library only, so importing it is cheap."""
