"""Run records in, a scaling study out: tables, files and one HTML page. Never loads torch; imports nothing here."""
