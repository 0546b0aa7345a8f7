"""What people see in a browser: templates, the files beside them, and how numbers and times are written."""
