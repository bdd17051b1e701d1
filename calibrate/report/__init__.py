"""One self-contained HTML file, and Markdown for the model card, from results."""
