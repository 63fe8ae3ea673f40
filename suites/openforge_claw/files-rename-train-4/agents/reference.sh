mv almond.md ember.txt
echo done
