"""What bodies hold: texts, media, and media by URL."""
